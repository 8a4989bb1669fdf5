"""The database: engine, schema, migrations, leader lock, audit and backup."""
