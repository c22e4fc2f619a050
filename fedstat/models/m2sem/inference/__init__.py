"""What a fitted mixture states with its errors: information over clients, profiles, and outside variables."""
