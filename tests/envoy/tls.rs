//! Replicas behind TLS: a front for each that wants a client's certificate, and the certificates, made for the test.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// The name that the replicas' certificate is for.
pub const NAME: &str = "replicas.test";

/// What both sides present and trust.
pub struct Authority {
    server: ServerConfig,
}

impl Authority {
    /// Makes an authority and two certificates, and writes what a client needs into a folder.
    pub fn new(folder: &Path) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // A leaf of the same name would look as if it had signed itself.
        params.distinguished_name.push(DnType::CommonName, "authority.test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let issue = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            (params.signed_by(&key, &issuer).unwrap(), key)
        };
        let (client, client_key) = issue("gateway.test");
        let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
        write("ca.pem", root.pem());
        write("client.pem", client.pem());
        write("client.key", client_key.serialize_pem());

        let mut roots = RootCertStore::empty();
        roots.add(root.der().clone()).unwrap();
        let provider = Arc::new(ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let (certificate, key) = issue(NAME);
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Self { server }
    }

    /// Puts TLS in front of a replica.
    pub async fn front(&self, replica: SocketAddr) -> Front {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(self.server.clone()));
        let protocols = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&protocols);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
                connections.spawn(async move {
                    let Ok(mut client) = acceptor.accept(stream).await else { return };
                    let protocol = client.get_ref().1.alpn_protocol().unwrap_or_default();
                    let protocol = String::from_utf8_lossy(protocol).into_owned();
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(protocol);
                    let mut replica = TcpStream::connect(replica).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut replica).await;
                });
            }
        });
        Front { address, protocols, task }
    }
}

/// TLS in front of a replica. Dropping it closes it.
pub struct Front {
    pub address: SocketAddr,
    protocols: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

impl Front {
    /// What the accepted connections speak, as negotiated.
    pub fn protocols(&self) -> Vec<String> {
        self.protocols.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Fields that make a cluster speak TLS to its replicas, with a client's certificate.
pub fn transport_socket(folder: &Path, protocols: &str) -> String {
    let file = |name: &str| format!("{{filename: {}}}", folder.join(name).display());
    format!(
        "    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: {NAME}
        common_tls_context:
          alpn_protocols: [{protocols}]
          tls_certificates:
          - {{certificate_chain: {}, private_key: {}}}
          validation_context:
            trusted_ca: {}
            match_typed_subject_alt_names:
            - {{san_type: DNS, matcher: {{exact: {NAME}}}}}
",
        file("client.pem"),
        file("client.key"),
        file("ca.pem"),
    )
}
