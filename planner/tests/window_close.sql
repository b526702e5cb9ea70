-- rows as they are
SELECT at, page FROM click
-- the largest of each window
SELECT window_start, max(page) AS most FROM TUMBLE(click, at, INTERVAL '10 seconds') GROUP BY window_start
-- rows with the largest of their window
SELECT c.window_start, c.user_id, c.page FROM TUMBLE(click, at, INTERVAL '10 seconds') AS c JOIN (SELECT window_start, max(page) AS most FROM TUMBLE(click, at, INTERVAL '10 seconds') GROUP BY window_start) AS m ON c.window_start = m.window_start AND c.page = m.most
-- counts by hopping window
SELECT window_start, page, count(*) AS n FROM HOP(click, at, INTERVAL '2 seconds', INTERVAL '10 seconds') GROUP BY window_start, page
-- sessions
SELECT user_id, window_start, window_end, count(*) AS n FROM SESSION(click, at, INTERVAL '4 seconds', user_id) GROUP BY user_id, window_start, window_end
