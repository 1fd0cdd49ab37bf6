"""What a file tells about itself."""

from pyggtrain.gguf import GGUFFile


def test_sample_hash_sees_weights_that_the_header_does_not(tiny_llama_path, tmp_path):
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(tiny_llama_path.read_bytes())
    base, other = GGUFFile.open(tiny_llama_path), GGUFFile.open(changed)
    assert base.sample_sha256 == other.sample_sha256
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    assert GGUFFile.open(changed).header_sha256 == base.header_sha256
    assert GGUFFile.open(changed).sample_sha256 != base.sample_sha256
