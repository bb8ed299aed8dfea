"""The league: what each method gains and loses at equal cost, on tracks where the truth is known."""
