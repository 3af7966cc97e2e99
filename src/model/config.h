// Shape of a Llama-style decoder.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

struct ModelConfig {
  int64_t vocab = 257;  ///< byte-level: 256 bytes and kBos
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 4;  ///< divides heads (grouped-query attention)
  int64_t head_dim = 64;
  int64_t ffn = 704;
  int64_t max_seq = 512;
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  bool tied_head = true;
  bool parallel_block = false;  ///< MegaScale §3.1: y = x + MLP(LN(x)) + Attn(LN(x))

  /// Parameters of the whole model.
  int64_t parameters() const;
  /// FLOPs of forward and backward per token at sequence length `seq`; `formula` says how.
  double flops_per_token(int64_t seq) const;
  static const char* flops_formula();
  /// Throws ConfigError naming the key that does not fit (also against tp: heads, kv_heads).
  void check(int tp) const;
  bool operator==(const ModelConfig&) const = default;
};

constexpr int32_t kBos = 256;  ///< token before the first byte of every document

/// Hugging Face `config.json` (LlamaForCausalLM keys, plus "parallel_block").
std::string to_json(const ModelConfig& config);
ModelConfig model_config_from_json(const std::string& json, const std::string& file);

}  // namespace tandem
