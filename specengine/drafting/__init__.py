"""What drafters share: what they read, the trees they make, which of their nodes pay, their networks."""
