"""What derivatives, operators, estimators, implicit functions, inner loops and pictures share."""
