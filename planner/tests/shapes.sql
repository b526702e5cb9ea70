-- filter over a keyed table
SELECT id, name FROM item WHERE price > 10
-- projection without the key
SELECT name FROM item
-- append-only table without a key
SELECT level, line FROM log WHERE level > 3
-- computed columns
SELECT id, price * 2 AS double_price, upper(name) AS loud FROM item
-- group by with every aggregate
SELECT item_id, count(*) AS n, count(note) AS notes, sum(amount) AS total, avg(amount) AS mean, min(amount) AS low, max(amount) AS high, bool_and(paid) AS all_paid, bool_or(paid) AS any_paid FROM orders GROUP BY item_id
-- min and max over append-only rows
SELECT auction, min(price) AS low, max(price) AS high FROM bid GROUP BY auction
-- distinct aggregates and filters
SELECT item_id, count(DISTINCT note) AS notes, sum(DISTINCT amount) AS total, max(amount) FILTER (WHERE paid) AS best_paid, count(DISTINCT amount) AS amounts, max(amount) AS high FROM orders GROUP BY item_id
-- global aggregate
SELECT count(*) AS n, sum(rate) AS rates FROM orders
-- having
SELECT item_id, sum(amount) AS total FROM orders GROUP BY item_id HAVING count(*) > 2
-- group by expressions
SELECT amount / 10 AS bucket, avg(rate * 2) AS mean FROM orders GROUP BY amount / 10
-- aggregate of an aggregate
SELECT n, count(*) AS groups FROM (SELECT item_id, count(*) AS n FROM orders GROUP BY item_id) AS g GROUP BY n
-- distinct
SELECT DISTINCT item_id, note FROM orders
-- distinct over unique rows
SELECT DISTINCT id, name FROM item
-- distinct over append-only rows
SELECT DISTINCT bidder FROM bid
-- distinct on
SELECT DISTINCT ON (item_id) item_id, id, amount FROM orders ORDER BY item_id, amount DESC
-- inner join on a key
SELECT o.id, i.name, o.amount FROM orders AS o JOIN item AS i ON o.item_id = i.id
-- inner join with a residual
SELECT o.id, i.name FROM orders AS o JOIN item AS i ON o.item_id = i.id AND o.amount > i.price
-- left join
SELECT o.id, i.name FROM orders AS o LEFT JOIN item AS i ON o.item_id = i.id
-- right join
SELECT i.id, o.amount FROM orders AS o RIGHT JOIN item AS i ON o.item_id = i.id
-- full join
SELECT i.id AS item, o.id AS orders FROM orders AS o FULL JOIN item AS i ON o.item_id = i.id
-- join on computed keys
SELECT o.id AS o, e.c FROM orders AS o JOIN entry AS e ON o.amount + 1 = e.a
-- join of tables without keys
SELECT x.c, y.b FROM entry AS x JOIN entry AS y ON x.a = y.b
-- three way join on one key
SELECT i.id, o.id AS o, e.c FROM item AS i JOIN orders AS o ON o.item_id = i.id JOIN entry AS e ON e.a = i.id
-- cross join
SELECT i.id, e.c FROM item AS i CROSS JOIN entry AS e
-- join on an inequality
SELECT i.id AS i, o.id AS o FROM item AS i JOIN orders AS o ON i.price < o.amount
-- exists
SELECT i.id, i.name FROM item AS i WHERE EXISTS (SELECT 1 FROM orders AS o WHERE o.item_id = i.id AND o.paid)
-- not exists
SELECT i.id FROM item AS i WHERE NOT EXISTS (SELECT 1 FROM orders AS o WHERE o.item_id = i.id)
-- in or
SELECT i.id FROM item AS i WHERE i.price > 100 OR i.id IN (SELECT item_id FROM orders)
-- not in
SELECT i.id FROM item AS i WHERE i.id NOT IN (SELECT item_id FROM orders)
-- scalar subquery
SELECT id, amount FROM orders WHERE amount > (SELECT avg(amount) FROM orders)
-- correlated scalar subquery
SELECT i.id, (SELECT max(o.amount) FROM orders AS o WHERE o.item_id = i.id) AS best FROM item AS i
-- union all
SELECT id, name FROM item UNION ALL SELECT id, note FROM orders
-- union
SELECT a FROM entry UNION SELECT item_id FROM orders
-- intersect
SELECT a FROM entry INTERSECT SELECT item_id FROM orders
-- except
SELECT a FROM entry EXCEPT SELECT item_id FROM orders
-- order by limit
SELECT id, amount FROM orders ORDER BY amount DESC, id LIMIT 10 OFFSET 5
-- order by a hidden column
SELECT note FROM orders ORDER BY amount LIMIT 3
-- order by alone
SELECT id FROM orders ORDER BY amount
-- limit alone
SELECT c FROM entry LIMIT 3
-- rank between
SELECT id, r FROM (SELECT id, rank() OVER (PARTITION BY item_id ORDER BY amount) AS r FROM orders) AS x WHERE r BETWEEN 2 AND 4
-- dense rank below, under other filters
SELECT y.id FROM (SELECT x.id, x.d, x.note FROM (SELECT id, note, dense_rank() OVER (PARTITION BY item_id ORDER BY amount) AS d FROM orders) AS x WHERE x.note IS NOT NULL) AS y WHERE 3 > y.d AND y.id > 7
-- row number without a limit
SELECT id, row_number() OVER (ORDER BY amount) AS n FROM orders
-- values
SELECT * FROM (VALUES (1, 'one'), (2, 'two')) AS v(n, name)
-- select without from
SELECT 1 AS one
-- values joined
SELECT o.id, v.name FROM orders AS o JOIN (VALUES (1, 'one'), (2, 'two')) AS v(n, name) ON o.amount = v.n
-- hop
SELECT window_start, count(*) AS n FROM HOP(bid, date_time, INTERVAL '2 seconds', INTERVAL '10 seconds') GROUP BY window_start
-- tumble with all columns
SELECT auction, window_start, window_end FROM TUMBLE(bid, date_time, INTERVAL '1 minute')
-- aggregate after a join on its key
SELECT i.id, i.name, count(*) AS n FROM item AS i JOIN orders AS o ON o.item_id = i.id GROUP BY i.id, i.name
-- top of groups of a small result
SELECT item_id, n FROM (SELECT item_id, count(*) AS n FROM orders GROUP BY item_id) AS g ORDER BY n DESC LIMIT 3
-- correlated not in
SELECT i.id FROM item AS i WHERE i.price NOT IN (SELECT o.amount FROM orders AS o WHERE o.item_id = i.id)
-- top-n over a join of rows without keys
SELECT x.c, y.c AS d FROM entry AS x JOIN entry AS y ON x.a = y.b ORDER BY x.b LIMIT 5
-- except all
SELECT a, b FROM entry EXCEPT ALL SELECT item_id, id FROM orders
-- rollup
SELECT item_id, amount, count(*) AS n, sum(id) AS s, grouping(amount) AS g FROM orders GROUP BY ROLLUP (item_id, amount)
-- first rows with ties
SELECT id, amount FROM orders ORDER BY amount OFFSET 1 FETCH FIRST 3 ROWS WITH TIES
-- window functions
SELECT id, lag(amount) OVER w AS l, sum(amount) OVER (w ROWS 2 PRECEDING) AS s, rank() OVER w AS r FROM orders WINDOW w AS (PARTITION BY item_id ORDER BY amount DESC)
-- windows over an aggregate
SELECT item_id, n, sum(n) OVER (ORDER BY item_id) AS so_far FROM (SELECT item_id, count(*) AS n FROM orders GROUP BY item_id) AS g
-- lookup join over a keyed table
SELECT o.id, i.name FROM orders AS o LEFT JOIN item FOR SYSTEM_TIME AS OF PROCTIME() AS i ON o.item_id = i.id
-- lookup join by a column that is no key
SELECT l.level, e.c FROM log AS l JOIN entry FOR SYSTEM_TIME AS OF PROCTIME() AS e ON l.level = e.a AND e.b > l.level
-- asof join
SELECT b.auction, b.price, l.line FROM bid AS b ASOF LEFT JOIN log AS l MATCH_CONDITION (b.date_time >= l.at) ON b.auction = l.level
-- sessions of all rows
SELECT window_start, count(*) AS n FROM SESSION(log, at, INTERVAL '1 minute') GROUP BY window_start
