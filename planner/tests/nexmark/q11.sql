SELECT bidder, count(*) AS bid_count, window_start, window_end
FROM SESSION(bid, date_time, INTERVAL '10 seconds', bidder)
GROUP BY bidder, window_start, window_end
