"""Recording events and impressions to Kafka."""
