"""What is checked before a job costs anything: resources, storage, the script; each finding with its remedy."""
