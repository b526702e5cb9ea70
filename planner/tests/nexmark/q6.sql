SELECT seller, avg(final) OVER (PARTITION BY seller ORDER BY date_time, id ROWS BETWEEN 9 PRECEDING AND CURRENT ROW) AS avg_final
FROM (
  SELECT a.id, a.seller, b.price AS final, b.date_time,
         row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time ASC) AS rownum
  FROM auction AS a JOIN bid AS b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
) AS winning
WHERE rownum = 1
