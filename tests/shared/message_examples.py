"""An example of every control message, with the encoded bytes of all its fields."""

from shared.rpc.messages import (
    AcceptRequest,
    Ack,
    CommitRequest,
    EncodeReply,
    EncodeRequest,
    Logprobs,
    Media,
    NodeInfo,
    NodeListChange,
    NodeStats,
    NodeUpdate,
    PushedNotice,
    RenewReply,
    RenewRequest,
    RequestEvent,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    SamplingParams,
    SetAdapterRequest,
    SetRoleRequest,
    StepRecord,
    StopRequest,
    SubmitRequest,
    ThinkingBudget,
    TokenDelta,
    pack_ids,
)

SUBMIT = SubmitRequest(
    "r", "router", pack_ids([1, 2]), 2, 5, SamplingParams(0.5, logit_bias={7: -1.0}, seed=3), grammar="g"
)


MEDIA = Media(4, 1, 2, b"d" * 2, 8, 4, b"p" * 3)
EXAMPLES: list[tuple[object, str]] = [
    (MEDIA, "98040102c40264640804c403707070a0"),
    (
        SamplingParams(0.5, logit_bias={7: -1.0}, seed=3),
        "9fcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c0c40090a0c0",
    ),
    (ThinkingBudget(5, 7, pack_ids([8]), 3), "940507c4040800000003"),
    (
        SUBMIT,
        "dc0012a172a6726f75746572c408010000000200000002059fcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c0c40090a0c000c400c40000a0c3a0a167c3a090a0",
    ),
    (RouterCommand("router", aborts=["r"]), "96a6726f757465729091a172c3c3c2"),
    (Logprobs(4, -0.5, 1, [4], [-0.5]), "9504cbbfe000000000000001910491cbbfe0000000000000"),
    (TokenDelta("r", 3, pack_ids([9]), "stop"), "9ca17203c40409000000a473746f70a0c2009090c2c40090"),
    (EncodeRequest("print", MEDIA, 3), "93a57072696e7498040102c40264640804c403707070a003"),
    (EncodeReply("no", 1, [b"f" * 4]), "93a26e6f0191c40466666666"),
    (
        NodeStats(running=2, channels={"d": "shm"}),
        "dc0026a572656164790200000000000000000000000000000000000081a164a373686d00909000000000a0a00000009000000000",
    ),
    (
        StepRecord(
            *(7, 10**18, 1500, 40, 1450, 64, "slo", 1, 32, 528, 2, 70, 0, 3, 1, 5, 4, 3, 2),
            members=pack_ids([4, 0, 32]),
        ),
        "dc001607cf0de0b6b3a7640000cd05dc28cd05aa40a3736c6f0120cd0210024600030105040302c40c0400000000000000200000000000",
    ),
    (
        RequestEvent("r", "transfer", 10**18, 250, -1, 2, 512, "h:1", "shm"),
        "9aa172a87472616e73666572cf0de0b6b3a7640000ccfaff02cd0200a3683a31a373686da0",
    ),
    (NodeUpdate([TokenDelta("r")]), "94919ca17200c400a0a0c2009090c2c40090c09090"),
    (
        NodeInfo("n", "b", "decode", "h:1", "m", "f", 16, 64, 9, 512, 8),
        "dc0010a16ea162a66465636f6465a3683a31a16da166104009cd020008a0a5726561647980a080",
    ),
    (NodeListChange([], ["n"], False), "939091a16ec2"),
    (
        ReserveRequest(SUBMIT, "w", "f"),
        "93dc0012a172a6726f75746572c408010000000200000002059fcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c0c40090a0c000c400c40000a0c3a0a167c3a090a0a177a166",
    ),
    (ReserveReply(b"t", 1, pack_ids([5]), {"shm": b"c"}), "96c4017401c4040500000081a373686dc40163a0c400"),
    (CommitRequest(b"t", 4, b"s"), "94c4017404c4017300"),
    (PushedNotice(b"t", b"s"), "92c40174c40173"),
    (RenewRequest("w", b"tt"), "92a177c4027474"),
    (RenewReply("", True, b"t"), "93a0c3c40174"),
    (StopRequest(b"t", "why", "r"), "93c40174a3776879a172"),
    (
        AcceptRequest(SUBMIT, b"{}", 24_000, 7),
        "94dc0012a172a6726f75746572c408010000000200000002059fcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c0c40090a0c000c400c40000a0c3a0a167c3a090a0c4027b7dcd5dc007",
    ),
    (SetAdapterRequest("a", "/d"), "92a161a22f64"),
    (SetRoleRequest("decode"), "92a66465636f6465cb403e000000000000"),
    (Ack(), "92a0c2"),
]
