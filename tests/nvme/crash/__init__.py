"""What a store keeps when its process is killed or its machine loses power."""
