"""Audio models, and sequence models of torch's own layers."""

from models.specimen import Architecture, Built, noise, tokens
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

MENDED = ("HD410",)


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        d_model=16,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Built(WhisperForConditionalGeneration(config), (noise(1, 8, 16), None, tokens(40, 1, 4)))


def wav2vec2():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=10,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return Built(Wav2Vec2ForCTC(config), (noise(1, 120),))


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.network = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, words):
        return self.head(self.network(self.embedding(words))[0])


def lstm():
    return Built(Tagger(nn.LSTM), (padded(),))


def gru():
    return Built(Tagger(nn.GRU), (padded(),))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, words):
        return self.head(self.encoder(self.embedding(words), src_key_padding_mask=words == 0)[:, 0])


def encoder():
    return Built(Encoder(), (padded(),))


def padded():
    words = tokens(20, 2, 5)
    words[1, 3:] = 0
    return words


def weight_normalized():
    layers = weight_norm(nn.Conv1d(2, 4, 3)), nn.ELU(), weight_norm(nn.Conv1d(4, 2, 3))
    return Built(nn.Sequential(*layers), (noise(1, 2, 10),))


ARCHITECTURES = [
    Architecture("Whisper", whisper, "transformers", warnings=MENDED),
    Architecture("Wav2Vec2", wav2vec2, "transformers", warnings=MENDED),
    Architecture("LSTM", lstm, quick=True),
    Architecture("GRU", gru),
    Architecture("Transformer encoder", encoder, warnings=MENDED, quick=True),
    Architecture("weight-normalized convolutions", weight_normalized, warnings=MENDED),
]
