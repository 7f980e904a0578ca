-- Less to write for each document. A customer's documents are listed by documents_flow, whose order is
-- the number of a document that was never delayed; the few others are in an index of their own.
CREATE INDEX documents_reordered ON {schema}.documents (customer, number)
    WHERE order_number IS DISTINCT FROM number;
DROP INDEX {schema}.documents_customer;
