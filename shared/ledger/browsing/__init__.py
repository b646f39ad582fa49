"""What people look at: replies page by page, one exchange whole, and how versions are rewarded."""
