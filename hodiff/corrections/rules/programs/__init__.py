"""Rules for code that runs other code: compiled scripts, operators that take functions, torch's own Python."""
