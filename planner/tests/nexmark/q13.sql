SELECT b.auction, b.bidder, b.price, b.date_time, s.name AS value
FROM bid AS b JOIN item FOR SYSTEM_TIME AS OF PROCTIME() AS s ON mod(b.auction, 10000) = s.id
