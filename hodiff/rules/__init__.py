"""Parts of Functions of any order: rules, nesting, batching and argument checks."""
