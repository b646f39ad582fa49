"""The process that shadow runs are made in, away from the app's interpreter lock."""
