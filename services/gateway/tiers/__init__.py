"""The tiers that can answer, one file each, behind one port."""
