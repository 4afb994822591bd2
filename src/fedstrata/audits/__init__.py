"""What a run gives away: attacks on what clients sent, with controls that show what the attacks can do."""
