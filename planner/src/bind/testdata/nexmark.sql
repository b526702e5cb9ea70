SELECT auction, bidder, price, date_time, extra FROM bid;
SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid;
SELECT auction, price FROM bid WHERE mod(auction, 123) = 0;
SELECT p.name, p.city, p.state, a.id FROM auction AS a INNER JOIN person AS p ON a.seller = p.id
  WHERE a.category = 10 AND (p.state = 'or' OR p.state = 'id' OR p.state = 'ca');
SELECT q.category, avg(q.final) AS avg FROM (
    SELECT max(b.price) AS final, a.category FROM auction a, bid b
    WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires GROUP BY a.id, a.category) q
  GROUP BY q.category;
SELECT auctionbids.auction, auctionbids.num FROM (
    SELECT auction, count(*) AS num, window_start AS starttime
    FROM HOP(bid, date_time, INTERVAL '2' SECOND, INTERVAL '10' SECOND) GROUP BY window_start, auction) AS auctionbids
  JOIN (SELECT max(countbids.num) AS maxn, countbids.starttime FROM (
      SELECT count(*) AS num, window_start AS starttime
      FROM HOP(bid, date_time, INTERVAL '2' SECOND, INTERVAL '10' SECOND) GROUP BY auction, window_start) AS countbids
    GROUP BY countbids.starttime) AS maxbids
  ON auctionbids.starttime = maxbids.starttime AND auctionbids.num >= maxbids.maxn;
SELECT b.auction, b.price, b.bidder, b.date_time, b.extra FROM bid b
  JOIN (SELECT max(price) AS maxprice, window_end AS date_time
    FROM TUMBLE(bid, date_time, INTERVAL '10' SECOND) GROUP BY window_end) b1
  ON b.price = b1.maxprice
  WHERE b.date_time BETWEEN b1.date_time - INTERVAL '10' SECOND AND b1.date_time;
SELECT p.id, p.name, p.starttime FROM (
    SELECT id, name, window_start AS starttime, window_end AS endtime
    FROM TUMBLE(person, date_time, INTERVAL '10' SECOND) GROUP BY id, name, window_start, window_end) p
  JOIN (SELECT seller, window_start AS starttime, window_end AS endtime
    FROM TUMBLE(auction, date_time, INTERVAL '10' SECOND) GROUP BY seller, window_start, window_end) a
  ON p.id = a.seller AND p.starttime = a.starttime AND p.endtime = a.endtime;
SELECT id, item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra,
    auction, bidder, price, bid_date_time, bid_extra FROM (
    SELECT a.*, b.auction, b.bidder, b.price, b.date_time AS bid_date_time, b.extra AS bid_extra,
      row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time ASC) AS rownum
    FROM auction a, bid b WHERE a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires) q
  WHERE rownum <= 1;
SELECT auction, bidder, price, channel, url, date_time, extra FROM (
    SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS rank_number FROM bid) q
  WHERE rank_number <= 1;
SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number FROM bid) q
  WHERE rank_number <= 10;
SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.date_time AS bid_date_time, b.extra AS bid_extra,
    a.item_name, a.description, a.initial_bid, a.reserve, a.date_time AS a_date_time, a.expires, a.seller, a.category, a.extra AS a_extra
  FROM bid b INNER JOIN auction a ON b.auction = a.id WHERE a.category = 10;
