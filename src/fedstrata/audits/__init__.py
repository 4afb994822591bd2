"""Audits of what a run gives away: attacks on clients' messages, and controls that show how strong the attacks are."""
