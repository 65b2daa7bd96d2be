"""Makes what watches the service from what it promises: rules, alerts, their tests, dashboards, the table in the docs."""
