"""What commands share and no training needs: pictures of others, files that a user names, how far the work has come."""
