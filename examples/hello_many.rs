//! One server answers several clients from one completion queue.

use std::error::Error;
use std::time::Duration;

use rdma_safe::{Device, Endpoint, EndpointSet, Operation};

const TIMEOUT: Duration = Duration::from_secs(5);
const CLIENTS: u32 = 3;

fn main() {
    if let Err(error) = run() {
        // A `main` that returned the error would print `{error:?}`, without the advice in its text.
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    // Without an RDMA device, run on soft0, a software device in this process.
    rdma_safe::soft::install_by_default();

    let pd = Device::first()?.open()?.alloc_pd()?;

    // Each endpoint of the server needs room for the completions of one send and one receive.
    let mut server = EndpointSet::builder(pd.context(), CLIENTS * 2).build()?;
    let mut clients = Vec::new();
    for number in 1..=CLIENTS {
        let mut client = Endpoint::builder(&pd).build()?;
        let key = Endpoint::builder(&pd).send_depth(1).recv_depth(1).build_in(&mut server)?;
        let mut endpoint = server.endpoint(key).expect("the endpoint was just built");
        endpoint.connect(&client.address())?;
        client.connect(&endpoint.address())?;
        endpoint.receive(pd.allocate(64)?)?;

        client.receive(pd.allocate(64)?)?;
        let mut request = pd.allocate(64)?;
        request.fill_from(format!("client {number}").as_bytes())?;
        client.send(request)?;
        clients.push(client);
    }

    // One send and one receive complete for each client, in any order. The key names the endpoint.
    for _ in 0..CLIENTS * 2 {
        let (key, done) = server.wait(TIMEOUT)?;
        let done = done.ok()?;
        if done.operation == Operation::Receive {
            let mut buffer = done.buffer.expect("a completed receive returns its buffer");
            let answer = format!("hello, {}", String::from_utf8_lossy(&buffer));
            buffer.fill_from(answer.as_bytes())?;
            server.endpoint(key).expect("no endpoint was removed").send(buffer)?;
        }
    }

    for (client, number) in clients.iter_mut().zip(1..) {
        // Two completions here as well: the send of the request and the receive of the answer.
        for _ in 0..2 {
            let done = client.wait(TIMEOUT)?.ok()?;
            if done.operation == Operation::Receive {
                let answer = done.buffer.expect("a completed receive returns its buffer");
                println!("client {number}: received {:?}", String::from_utf8_lossy(&answer));
            }
        }
    }
    Ok(())
}
