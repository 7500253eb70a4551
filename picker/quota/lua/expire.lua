-- Give back what reservations hold that have outlived their time.
-- KEYS: version

expire()
save()
return 'expired'
