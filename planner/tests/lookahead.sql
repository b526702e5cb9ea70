-- advertising events by campaign
SELECT c.campaign_id, w.window_start, count(*) AS n FROM TUMBLE(ad_event, at, INTERVAL '10 seconds') AS w JOIN campaign AS c ON w.ad_id = c.ad_id WHERE w.kind = 'view' GROUP BY c.campaign_id, w.window_start
-- advertising events, looked up
SELECT e.ad_id, c.campaign_id, e.at FROM ad_event AS e JOIN campaign FOR SYSTEM_TIME AS OF PROCTIME() AS c ON e.ad_id = c.ad_id WHERE e.kind = 'view'
-- star of five tables
SELECT f.id, a.label AS a, b.label AS b, c.label AS c, d.label AS d FROM fact AS f JOIN dim_a AS a ON f.a = a.id JOIN dim_b AS b ON f.b = b.id JOIN dim_c AS c ON f.c = c.id JOIN dim_d AS d ON f.d = d.id
-- chain of five tables
SELECT f.id, d.label FROM fact AS f JOIN dim_a AS a ON f.a = a.id JOIN dim_b AS b ON a.next = b.id JOIN dim_c AS c ON b.next = c.id JOIN dim_d AS d ON c.next = d.id
-- view on a view
SELECT i.name, sum(r.total) AS total FROM revenue AS r JOIN item AS i ON r.item_id = i.id GROUP BY i.name
-- view on a view without state
SELECT p.amount, i.name FROM paid AS p JOIN item AS i ON p.item_id = i.id WHERE p.amount > 3
-- view on three views
SELECT m.amount, i.name FROM moved AS m JOIN item AS i ON m.next_item = i.id
-- group by a computed column
SELECT amount / 10 AS bucket, count(*) AS n FROM orders WHERE paid GROUP BY amount / 10
-- hopping windows
SELECT window_start, auction, count(*) AS n FROM HOP(bid, date_time, INTERVAL '2 seconds', INTERVAL '10 seconds') GROUP BY window_start, auction
-- both branches of a union
SELECT k, count(*) AS n FROM (SELECT a AS k FROM entry WHERE b > 1 UNION ALL SELECT item_id FROM orders) AS u GROUP BY k
-- grouping sets
SELECT item_id, amount, count(*) AS n FROM orders GROUP BY GROUPING SETS ((item_id), (item_id, amount))
-- window functions
SELECT id, lag(amount) OVER (PARTITION BY item_id ORDER BY id) AS before FROM orders
-- semi join and anti join
SELECT i.id FROM item AS i WHERE EXISTS (SELECT 1 FROM orders AS o WHERE o.item_id = i.id AND o.paid) AND NOT EXISTS (SELECT 1 FROM entry AS e WHERE e.a = i.id)
-- none: one group, one window of all rows, a cross join
SELECT o.n, i.name FROM (SELECT count(*) AS n FROM orders) AS o CROSS JOIN (SELECT name FROM item ORDER BY price LIMIT 3) AS i
-- groups by a result
SELECT n, count(*) AS groups FROM (SELECT item_id, count(*) AS n FROM orders GROUP BY item_id) AS g GROUP BY n
-- groups by columns of both sides
SELECT o.note, i.name, count(*) AS n FROM orders AS o JOIN item AS i ON o.item_id = i.id GROUP BY o.note, i.name
-- tumbling windows
SELECT window_start, auction, count(*) AS n FROM TUMBLE(bid, date_time, INTERVAL '10 seconds') GROUP BY window_start, auction
-- none for NOT IN
SELECT i.id FROM item AS i WHERE i.price NOT IN (SELECT amount FROM orders)
-- a result that is a key behind another join
SELECT c.item_id, c.n, i.name, a.label FROM (SELECT item_id, count(*) AS n FROM orders GROUP BY item_id) AS c JOIN item AS i ON c.item_id = i.id JOIN dim_a AS a ON c.n = a.id
-- groups by a column that a join finds, named behind them
SELECT g.next, g.n, b.label FROM (SELECT a.next, count(*) AS n FROM fact AS f JOIN dim_a AS a ON f.a = a.id GROUP BY a.next) AS g JOIN dim_b AS b ON g.next = b.id
