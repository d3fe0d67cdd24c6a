"""What every room may use: errors and exit statuses, text and files of others, private files, threads."""
