"""How soon a release that is worse is rolled back, how often an equal one is, and what is lost meanwhile."""
