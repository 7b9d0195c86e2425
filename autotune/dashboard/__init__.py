"""The page that the admin port shows: its figures, its routes, and the plain HTML, CSS and JavaScript below static/."""
