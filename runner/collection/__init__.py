"""What a run was like as one record, preferences of people, figures of an agent."""
