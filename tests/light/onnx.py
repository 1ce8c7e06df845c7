raise ImportError("not in a light service")
