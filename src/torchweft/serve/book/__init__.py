"""What calls have shown, written down: plans in use, what their ops took, what ranks agree on."""
