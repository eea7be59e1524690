use mooncake_core::clock::Rng;
use mooncake_core::testkit::test_seed;

use super::*;

/// Numbers that a message is made of.
struct Draw(Rng);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn word(&mut self) -> u64 {
        // Small numbers and large ones.
        let shift = self.below(64);
        self.0.next_u64() >> shift
    }

    fn is(&mut self) -> bool {
        self.below(2) == 0
    }

    fn rank(&mut self) -> GlobalRank {
        GlobalRank(self.below(64) as u8)
    }

    fn list<T>(&mut self, most: u64, mut element: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let length = self.below(most + 1);
        (0..length).map(|_| element(self)).collect()
    }

    fn text(&mut self) -> String {
        self.list(30, |draw| char::from_u32(draw.below(0xd800) as u32).unwrap_or('x')).into_iter().collect()
    }

    fn bytes(&mut self) -> Bytes {
        let most = if self.below(8) == 0 { MAX_ENDPOINT as u64 } else { 40 };
        self.list(most, |draw| draw.below(256) as u8).into()
    }

    fn slots(&mut self) -> Vec<Slot> {
        self.list(64, |draw| Slot(draw.below(64) as u8))
    }

    fn spec(&mut self) -> GroupSpec {
        GroupSpec {
            name: self.text(),
            order: self.list(64, Self::rank),
            capacity: self.below(65) as usize,
            mode: if self.is() { AttachMode::CreateOrAttach } else { AttachMode::AttachOrExtend },
            auto_deactivate: self.is(),
        }
    }

    fn member(&mut self) -> Member {
        use MemberState::{Active, AwaitingActivation, Inactive, Left, None};
        Member {
            rank: self.rank(),
            incarnation: self.word(),
            state: [None, Inactive, AwaitingActivation, Active, Left][self.below(5) as usize],
            rank_state: [RankState::Offline, RankState::Synced, RankState::Healthy][self.below(3) as usize],
            endpoint: self.is().then(|| self.bytes()),
        }
    }

    fn view(&mut self) -> Arc<View> {
        Arc::new(View {
            epoch: self.word(),
            mask: self.word(),
            generation: self.word(),
            capacity: self.below(65) as usize,
            members: self.list(64, Self::member),
        })
    }

    fn request(&mut self) -> Request {
        let group = GroupId(self.word());
        match self.below(7) {
            0 => Request::RegisterGroup(self.spec()),
            1 => Request::Reattach(group),
            2 => Request::UnregisterGroup(group),
            3 => Request::PublishEndpoint { group, endpoint: self.bytes() },
            4 => Request::ConfirmReady(group),
            5 => {
                let change = if self.is() { Change::Activate } else { Change::Deactivate };
                Request::Propose { group, change, slots: self.slots() }
            }
            _ => Request::Sync(group),
        }
    }

    fn message_of_agent(&mut self) -> ToCoordinator {
        match self.below(6) {
            0 => ToCoordinator::Register {
                rank: self.rank(),
                session: SessionId(self.word()),
                world: self.is().then(|| WorldId(self.word())),
                address: self.text(),
            },
            1 => ToCoordinator::Heartbeat { unanswered: RequestId(self.word()) },
            2 => {
                let links = self.list(256, |draw| LinkEvidence {
                    rank: draw.rank(),
                    incarnation: draw.word(),
                    is_up: draw.is(),
                });
                ToCoordinator::Evidence { report: self.word(), links }
            }
            3 => ToCoordinator::Applied { group: GroupId(self.word()), epoch: self.word() },
            4 => ToCoordinator::Request { id: RequestId(self.word()), request: self.request() },
            _ => ToCoordinator::Leave,
        }
    }

    fn response(&mut self) -> Response {
        match self.below(6) {
            0 => Response::Attached { group: GroupId(self.word()), slot: Slot(self.below(64) as u8) },
            1 => Response::Done,
            2 => Response::Proposed(ProposalOutcome::Rejected(self.text())),
            3 => Response::Proposed(ProposalOutcome::Applied { epoch: self.word(), dropped: self.slots() }),
            4 => Response::Synced { is_reconciled: self.is(), epoch: self.word() },
            _ => Response::Refused(self.text()),
        }
    }

    fn message_of_coordinator(&mut self) -> ToAgent {
        match self.below(10) {
            0 => ToAgent::Registered { world: WorldId(self.word()), incarnation: self.word() },
            1 => ToAgent::Refused { reason: self.text(), may_retry: self.is() },
            2 => ToAgent::Replaced,
            3 => ToAgent::HeartbeatTaken,
            4 => ToAgent::EvidenceTaken { report: self.word() },
            5 => ToAgent::Ranks(self.list(64, |draw| RankInfo {
                rank: draw.rank(),
                incarnation: draw.word(),
                session: SessionId(draw.word()),
                address: draw.text(),
            })),
            6 => ToAgent::Suspects(self.list(64, |draw| (draw.rank(), draw.word()))),
            7 => ToAgent::View { group: GroupId(self.word()), view: self.view() },
            8 => ToAgent::Ready(GroupId(self.word())),
            _ => ToAgent::Response { id: RequestId(self.word()), response: self.response() },
        }
    }
}

fn framed<M: Message>(message: &M) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(message, &mut frame);
    let length = message_length(*frame.first_chunk().unwrap()).unwrap();
    assert_eq!(length + 4, frame.len());
    frame.split_off(4)
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn messages_survive_encoding() {
    let mut draw = Draw(Rng::seeded(test_seed()));
    for _ in 0..2000 {
        let message = draw.message_of_agent();
        assert_eq!(decode::<ToCoordinator>(&framed(&message)), Ok(message));
        let message = draw.message_of_coordinator();
        assert_eq!(decode::<ToAgent>(&framed(&message)), Ok(message));
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn other_bytes_are_refused() {
    let mut draw = Draw(Rng::seeded(test_seed()));
    for _ in 0..2000 {
        let bytes = draw.bytes();
        // A message that is decoded has exactly these bytes.
        if let Ok(message) = decode::<ToAgent>(&bytes) {
            assert_eq!(framed(&message), bytes[..]);
        }
        if let Ok(message) = decode::<ToCoordinator>(&bytes) {
            assert_eq!(framed(&message), bytes[..]);
        }
        // Messages with one changed, missing or added byte.
        let mut bytes = framed(&draw.message_of_coordinator());
        assert!(decode::<ToAgent>(&bytes[..bytes.len() - 1]).is_err());
        let at = draw.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << draw.below(8);
        if let Ok(message) = decode::<ToAgent>(&bytes) {
            assert_eq!(framed(&message), bytes);
        }
        let mut bytes = framed(&draw.message_of_agent());
        bytes.push(0);
        assert!(decode::<ToCoordinator>(&bytes).is_err());
    }
}

#[test]
fn a_message_has_the_documented_bytes() {
    let heartbeat = ToCoordinator::Heartbeat { unanswered: RequestId(0x0102) };
    let mut frame = Vec::new();
    encode(&heartbeat, &mut frame);
    assert_eq!(frame, [9, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0]);
    assert!(message_length([0xff; 4]).is_err());
}

#[test]
fn the_largest_view_fits_a_frame() {
    let endpoint = Some(Bytes::from(vec![7; MAX_ENDPOINT]));
    let member = Member {
        rank: GlobalRank(63),
        incarnation: 1,
        state: MemberState::Active,
        rank_state: RankState::Healthy,
        endpoint,
    };
    let view = View { epoch: 1, mask: 1, generation: 1, capacity: 64, members: vec![member; MAX_RANKS] };
    let message = ToAgent::View { group: GroupId(1), view: Arc::new(view) };
    assert!(framed(&message).len() <= MAX_MESSAGE);
}

#[test]
fn long_texts_are_cut_between_characters() {
    let message = ToAgent::Refused { reason: "\u{e9}".repeat(MAX_TEXT), may_retry: false };
    let Ok(ToAgent::Refused { reason, .. }) = decode(&framed(&message)) else { panic!("no refusal") };
    assert_eq!(reason, "\u{e9}".repeat(MAX_TEXT / 2));
}

#[test]
fn hellos_name_version_and_purpose() {
    for purpose in [Purpose::Control, Purpose::Link] {
        let hello =
            Hello { version: VERSION, purpose, has_proof: purpose == Purpose::Link, session: SessionId(5) };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        // Another version may have other purposes.
        let mut other = Hello { version: VERSION + 1, ..hello }.encode();
        other[10] = 9;
        assert_eq!(Hello::decode(&other).map(|hello| hello.version), Some(VERSION + 1));
        let mut broken = hello.encode();
        broken[10] = 9;
        assert_eq!(Hello::decode(&broken), None);
        broken = hello.encode();
        broken[0] ^= 1;
        assert_eq!(Hello::decode(&broken), None);
    }
    for verdict in [Verdict::Accepted, Verdict::OtherVersion, Verdict::OtherProcess] {
        let answer = Answer { version: VERSION, verdict };
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
    }
    assert_eq!(Answer::decode(&[0; ANSWER_LENGTH]), None);
}
