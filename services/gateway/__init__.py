"""The doors (REST, gRPC, OpenAI, the console) and the data plane behind them."""
