//! TLS 1.3 between nodes, with certificates that are compared, not chained to anybody.
//!
//! Who dials knows whose certificate must be there, from a pin or a token, and goes away from any other. Who
//! accepts takes every certificate whose key the other side holds and learns its fingerprint: a node that wants to
//! join is not pinned yet. What a stranger may do then is decided by the first message, not here.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, CommonState, DigitallySignedStruct, DistinguishedName, Error,
    ServerConfig, SignatureScheme,
};

use super::identity::{Fingerprint, Identity};

/// Messages between nodes ([`super::proto`]).
pub const CONTROL: &[u8] = b"spark-control/1";

/// One stream of somebody else's bytes.
pub const RELAY: &[u8] = b"spark-relay/1";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// For the side that accepts.
pub fn server(identity: &Identity) -> Result<Arc<ServerConfig>, Error> {
    let provider = provider();
    let verifier = Arc::new(AnyWithKey { provider: provider.clone() });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate.clone()], identity.key.clone_key())?;
    config.alpn_protocols = vec![CONTROL.to_vec(), RELAY.to_vec()];
    // A resumed session would skip the certificates.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// For the side that dials the node with the certificate `expected`.
pub fn client(identity: &Identity, expected: Fingerprint, alpn: &[u8]) -> Result<Arc<ClientConfig>, Error> {
    let provider = provider();
    let verifier = Arc::new(Exactly { expected, provider: provider.clone() });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(vec![identity.certificate.clone()], identity.key.clone_key())?;
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// The name that is dialled. Certificates are compared whole; the name says nothing.
pub fn name() -> ServerName<'static> {
    ServerName::try_from("spark-kv").expect("a constant, valid name")
}

/// Fingerprint of the certificate that the other side of a finished handshake holds the key of.
pub fn fingerprint(state: &CommonState) -> Option<Fingerprint> {
    state.peer_certificates()?.first().map(Fingerprint::of)
}

/// The part of both verifiers that has nothing to decide: TLS 1.3 signatures as the provider checks them, no other.
macro_rules! tls13_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("only TLS 1.3 is spoken between nodes".into()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

#[derive(Debug)]
struct Exactly {
    expected: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Exactly {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if Fingerprint::of(end_entity) == self.expected {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    tls13_signatures!();
}

#[derive(Debug)]
struct AnyWithKey {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyWithKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    tls13_signatures!();
}
