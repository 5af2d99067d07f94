//! How fast it is here. Not a test of anything: run by hand with `-- --ignored --nocapture`.

use super::*;

#[tokio::test]
#[ignore = "measures"]
async fn throughput() {
    for (io, name) in [(Io::Ring, "ring"), (Io::Plain, "plain")] {
        let place = Place::on_drive(io, name);
        let options =
            Options { capacity: Bytes::gib(2), segment: Bytes::mib(256), queue_depth: 32, ..place.options() };
        let (store, _) = open_with(&options, &place.disk);
        let rows = area(64, 1 << 20, SPACE);
        store.attach(&rows).await.unwrap();
        (0..64).for_each(|row| fill(&rows, row, row));
        let begin = std::time::Instant::now();
        for round in 0..12_u32 {
            let items = (0..64).map(|row| item(round * 64 + row, row)).collect();
            assert_eq!(count(&store.put(&rows, items).await, Outcome::Stored), 64);
        }
        let wrote = begin.elapsed().as_secs_f64();
        let begin = std::time::Instant::now();
        for round in 0..12_u32 {
            let items = (0..64).map(|row| item(round * 64 + row, row)).collect();
            assert_eq!(count(&store.get(&rows, items, None).await, Outcome::FromDrive), 64);
        }
        let read = begin.elapsed().as_secs_f64();
        println!("{name}: wrote {:.2} GiB/s, read {:.2} GiB/s in rows of 1 MiB", 0.75 / wrote, 0.75 / read);
        store.close().await;
        let begin = std::time::Instant::now();
        let (store, opened) = open_with(&options, &place.disk);
        println!("{name}: started on {} rows in {:?}", opened.rows, begin.elapsed());
        store.close().await;
    }
}
