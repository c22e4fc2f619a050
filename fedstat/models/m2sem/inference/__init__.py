"""What a fitted mixture states with its errors: information over sites, profiles, and outside variables."""
