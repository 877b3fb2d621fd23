"""One plan for two tiers: where it is cut, what is pushed below the cut, and what that saves."""
