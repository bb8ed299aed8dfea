"""The methods, and the one loop that trains them."""
