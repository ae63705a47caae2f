"""How arrays are divided over devices."""
