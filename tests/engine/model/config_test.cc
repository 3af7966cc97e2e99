#include "engine/model/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/model/initialize.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

std::string error_of(const std::string& json) {
  try {
    model_config_from_json(json, "dir/config.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ModelConfig, JsonRoundTrips) {
  for (const Variant& variant : kVariants) {
    const ModelConfig config = small_model(variant);
    EXPECT_EQ(model_config_from_json(to_json(config), "x"), config);
  }
}

TEST(ModelConfig, JsonErrorsNameFileAndKey) {
  auto root = nlohmann::ordered_json::parse(to_json(small_model()));
  const auto with = [&](const char* key, const nlohmann::ordered_json& value) {
    auto changed = root;
    changed[key] = value;
    return error_of(changed.dump());
  };
  EXPECT_EQ(with("hidden_sizes", 3),
            "dir/config.json: unknown key hidden_sizes: nearest valid key is hidden_size");
  EXPECT_EQ(with("hidden_size", "big"),
            "dir/config.json: hidden_size = \"big\": expected an integer");
  EXPECT_EQ(with("hidden_act", "gelu"),
            "dir/config.json: hidden_act = \"gelu\": expected \"silu\"");
  EXPECT_EQ(with("tie_word_embeddings", 1),
            "dir/config.json: tie_word_embeddings = 1: expected true or false");
  EXPECT_EQ(with("num_hidden_layers", 0),
            "dir/config.json: model.layers = 0: expected between 1 and 2^31");
  EXPECT_EQ(with("vocab_size", 18446744073709551615ull),
            "dir/config.json: vocab_size = 18446744073709551615: expected an integer below 2^63");
  auto missing = root;
  missing.erase("vocab_size");
  EXPECT_EQ(error_of(missing.dump()), "dir/config.json: key vocab_size is missing");
  const std::string families =
      "expected llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, smollm3, phi3, "
      "granite, ernie4_5, olmo2, gemma2, gemma3_text, gpt_oss or tandem";
  EXPECT_EQ(with("kv_lora_rank", 512),
            "dir/config.json: kv_lora_rank = 512: expected none, as multi-head latent attention is "
            "not supported");
  EXPECT_EQ(with("model_type", "gemma"), "dir/config.json: model_type = \"gemma\": " + families);
  missing = root;
  missing.erase("model_type");
  EXPECT_EQ(error_of(missing.dump()), "dir/config.json: key model_type is missing: " + families);
  EXPECT_NE(with("num_local_experts", 4).find("unknown key num_local_experts"), std::string::npos);
  ModelConfig moe = small_model();
  moe.experts = 4;
  auto without = nlohmann::ordered_json::parse(to_json(moe));
  without["num_local_experts"] = 0;
  EXPECT_EQ(error_of(without.dump()),
            "dir/config.json: num_local_experts = 0: expected at least 1");
  without.erase("num_local_experts");
  EXPECT_EQ(error_of(without.dump()), "dir/config.json: key num_local_experts is missing");
  EXPECT_EQ(error_of("[]"), "dir/config.json: expected a JSON object");
  EXPECT_EQ(error_of("{"), "dir/config.json: not JSON, or nested more than 100 deep");
}

TEST(ModelConfig, MissingKeysHaveTheDefaultsOfTheirFormat) {
  const auto read = [](ModelConfig config, std::vector<const char*> absent, auto change) {
    auto root = nlohmann::ordered_json::parse(to_json(config));
    for (const char* key : absent) root.erase(key);
    change(root);
    return model_config_from_json(root.dump(), "x");
  };
  const auto as_it_is = [](auto&) {};
  ModelConfig config = small_model();
  config.tie_word_embeddings = true;
  config.rope_theta = 7;
  const ModelConfig llama = read(config, {"tie_word_embeddings", "rope_theta"}, as_it_is);
  EXPECT_FALSE(llama.tie_word_embeddings);
  EXPECT_EQ(llama.rope_theta, 1e4);
  config.experts = 4;
  const ModelConfig mixtral = read(config, {"tie_word_embeddings", "rope_theta", "head_dim"},
                                   [](auto& root) { root["head_dim"] = nullptr; });
  EXPECT_FALSE(mixtral.tie_word_embeddings);
  EXPECT_EQ(mixtral.rope_theta, 1e6);
  EXPECT_EQ(mixtral.head_dim, config.hidden / config.heads);
  const auto with_rope = [&](const nlohmann::ordered_json& rope) {
    return read(config, {"rope_theta"}, [&](auto& root) { root["rope_parameters"] = rope; });
  };
  EXPECT_EQ(with_rope({{"rope_theta", 500.0}, {"rope_type", "default"}}).rope_theta, 500);
  EXPECT_THROW(with_rope({{"rope_theta", 500.0}, {"rope_type", "yarn"}}), ConfigError);
  EXPECT_THROW(with_rope({{"rope_theta", 500.0}, {"factor", 8}}), ConfigError);
}

// transformers would load every tensor and compute a different function.
TEST(ModelConfig, HuggingFaceTypeIsWrittenOnlyIfItComputesTheSame) {
  const auto type = [](auto change) {
    ModelConfig config = small_model();
    change(config);
    const std::string json = to_json(config);
    EXPECT_EQ(model_config_from_json(json, "x"), config);
    const auto root = nlohmann::json::parse(json);
    return root["model_type"].get<std::string>() + " " +
           root["architectures"][0].get<std::string>();
  };
  const std::string tandem = "tandem TandemForCausalLM";
  EXPECT_EQ(type([](auto&) {}), "llama LlamaForCausalLM");
  EXPECT_EQ(type([](auto& c) { c.parallel_block = true; }), tandem);
  EXPECT_EQ(type([](auto& c) { c.experts = 4; }), "mixtral MixtralForCausalLM");
  EXPECT_EQ(type([](auto& c) { c.sliding_window = 8; }), "mistral MistralForCausalLM");
  EXPECT_EQ(type([](auto& c) { c.sliding_window = 8, c.full_attention_freq = 2; }), tandem);
  EXPECT_EQ(type([](auto& c) { c.sliding_window = 8, c.parallel_block = true; }), tandem);
  const auto moe = [&](auto change) {
    return type([&](auto& c) {
      c.experts = 4;
      change(c);
    });
  };
  EXPECT_EQ(moe([](auto& c) { c.sliding_window = 8; }), "mixtral MixtralForCausalLM");
  EXPECT_EQ(moe([](auto& c) { c.sliding_window = 8, c.full_attention_freq = 2; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.expert_ffn = c.ffn; }), "mixtral MixtralForCausalLM");
  EXPECT_EQ(moe([](auto& c) { c.expert_ffn = c.ffn / 2; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.shared_ffn = 8; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.moe_layer_freq = 2; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.router = "sigmoid"; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.normalize_top_k = false; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.route_scale = 2.5; }), tandem);
  EXPECT_EQ(moe([](auto& c) { c.router_bias_update_rate = 0.1; }), tandem);
}

TEST(ModelConfig, SlidingWindowsAreThoseOfHuggingFace) {
  ModelConfig config = small_model();
  config.layers = 5;
  config.sliding_window = 8;
  config.full_attention_freq = 2;
  auto root = nlohmann::ordered_json::parse(to_json(config));
  EXPECT_EQ(root["sliding_window"], 8);
  const char* const full = "full_attention";
  const char* const sliding = "sliding_attention";
  using List = std::vector<std::string>;
  EXPECT_EQ(root["layer_types"].get<List>(), (List{sliding, full, sliding, full, sliding}));
  const auto with = [&](const char* key, const nlohmann::ordered_json& value) {
    auto changed = root;
    changed[key] = value;
    return changed.dump();
  };
  const auto read = [&](const char* key, const nlohmann::ordered_json& value) {
    return model_config_from_json(with(key, value), "x");
  };
  EXPECT_EQ(read("layer_types", List(5, full)).sliding_window, 0);
  EXPECT_EQ(read("layer_types", List(5, sliding)).full_attention_freq, 0);
  EXPECT_EQ(read("layer_types", List(5, sliding)).sliding_window, 8);
  EXPECT_EQ(read("layer_types", {sliding, sliding, full, sliding, sliding}).full_attention_freq, 3);
  EXPECT_NE(error_of(with("layer_types", {full, sliding, full, sliding, full}))
                .find("expected \"full_attention\" in every n-th layer, in the first ones, or in "
                      "none"),
            std::string::npos);
  EXPECT_NE(error_of(with("layer_types", {full, sliding}))
                .find("expected an array of num_hidden_layers = 5 strings"),
            std::string::npos);
  EXPECT_NE(error_of(with("layer_types", List(5, "linear_attention")))
                .find("expected of \"full_attention\" and \"sliding_attention\""),
            std::string::npos);
  EXPECT_NE(error_of(with("sliding_window", nullptr)).find("expected sliding_window with"),
            std::string::npos);
  EXPECT_EQ(error_of(with("sliding_window", 0)),
            "dir/config.json: sliding_window = 0: expected null or at least 1");

  config.full_attention_freq = 0;
  root = nlohmann::ordered_json::parse(to_json(config));  // mistral
  EXPECT_EQ(read("sliding_window", nullptr).sliding_window, 0);
  root.erase("sliding_window");
  EXPECT_EQ(model_config_from_json(root.dump(), "x").sliding_window, 4096);
  config.sliding_window = 0;
  root = nlohmann::ordered_json::parse(to_json(config));  // llama
  EXPECT_FALSE(root.contains("sliding_window"));
  EXPECT_NE(error_of(with("sliding_window", 8)).find("unknown key sliding_window"),
            std::string::npos);
  config.experts = 4;
  root = nlohmann::ordered_json::parse(to_json(config));  // mixtral
  EXPECT_TRUE(root["sliding_window"].is_null());
  EXPECT_EQ(read("sliding_window", 8).sliding_window, 8);
}

TEST(ModelConfig, SlidingWindowsCountTheKeysThatAreRead) {
  ModelConfig config = small_model();
  config.layers = 4;
  const double full = config.flops_per_token(1024);
  const double attention = 6.0 * 4 * double(config.heads * config.head_dim) * 1024;
  config.sliding_window = 1024;
  EXPECT_DOUBLE_EQ(config.flops_per_token(1024), full);
  config.sliding_window = 128;
  const double windowed = attention * (2 * 128 - 128 * 128 / 1024.0) / 1024;
  EXPECT_DOUBLE_EQ(config.flops_per_token(1024), full - attention + windowed);
  EXPECT_DOUBLE_EQ(config.flops_per_token(100),
                   ModelConfig(small_model()).flops_per_token(100) * 2 -
                       6.0 * double(config.vocab * config.hidden));
  config.full_attention_freq = 2;
  EXPECT_DOUBLE_EQ(config.flops_per_token(1024), full - attention / 2 + windowed / 2);
}

TEST(ModelConfig, VariantsOfLlamaAreOfTheirFamilies) {
  const auto type_of = [](auto change) {
    ModelConfig config = small_model();
    change(config);
    const std::string text = to_json(config);
    EXPECT_EQ(model_config_from_json(text, "x"), config);
    return nlohmann::json::parse(text)["model_type"].get<std::string>();
  };
  EXPECT_EQ(type_of([](auto& c) { c.qkv_bias = c.out_bias = true; }), "llama");
  EXPECT_EQ(type_of([](auto& c) { c.mlp_bias = true; }), "llama");
  EXPECT_EQ(type_of([](auto& c) { c.out_bias = true; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.qkv_bias = c.out_bias = c.qk_norm = true; }), "qwen3");
  EXPECT_EQ(type_of([](auto& c) { c.qkv_bias = c.qk_norm = true; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.no_rope_layer_interval = 2; }), "smollm3");
  EXPECT_EQ(type_of([](auto& c) { c.no_rope_layer_interval = 9; }), "smollm3");
  EXPECT_EQ(type_of([](auto& c) { c.no_rope_layer_interval = 2, c.sliding_window = 4; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.fused_projections = true; }), "phi3");
  EXPECT_EQ(type_of([](auto& c) { c.fused_projections = true, c.sliding_window = 4; }), "phi3");
  EXPECT_EQ(type_of([](auto& c) { c.fused_projections = true, c.rotary_dim = 2; }), "phi3");
  EXPECT_EQ(type_of([](auto& c) { c.rotary_dim = 2; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.attention_multiplier = 0.5; }), "granite");
  EXPECT_EQ(type_of([](auto& c) { c.logits_scaling = 2, c.attention_multiplier = 1; }), "granite");
  EXPECT_EQ(type_of([](auto& c) { c.logits_scaling = 2, c.qk_norm = true; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.attention_sinks = true; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.attention_softcap = 50, c.logits_softcap = 30.5; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.mlp_activation = "gelu_pytorch_tanh"; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.sliding_window = 4, c.rope_local_theta = 100; }), "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.rope_interleaved = true; }), "ernie4_5");
  EXPECT_EQ(
      type_of([](auto& c) { c.rope_interleaved = c.qkv_bias = c.out_bias = c.mlp_bias = true; }),
      "ernie4_5");
  EXPECT_EQ(type_of([](auto& c) { c.rope_interleaved = c.mlp_bias = true; }), "tandem");
  const auto norms = [](ModelConfig& c, const char* position, bool all_heads) {
    c.norm_position = position, c.qk_norm = true, c.qk_norm_all_heads = all_heads;
  };
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "post", true); }), "olmo2");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "post", true), c.qkv_bias = c.out_bias = true; }),
            "olmo2");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "post", true), c.sliding_window = 4; }), "tandem");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "post", false); }), "tandem");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "both", true); }), "tandem");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "pre", true); }), "tandem");
  EXPECT_EQ(type_of([&](auto& c) { norms(c, "post", true), c.zero_centered_norms = true; }),
            "tandem");
  EXPECT_EQ(type_of([](auto& c) { c.zero_centered_norms = true; }), "tandem");
  const auto gpt_oss = [](auto& c) {
    c.experts = 4, c.swiglu_limit = 7, c.aux_loss_coeff = 0.5;
    c.qkv_bias = c.out_bias = c.attention_sinks = true;
    c.router_logit_bias = c.expert_bias = c.fused_experts = true;
  };
  EXPECT_EQ(type_of(gpt_oss), "gpt_oss");  // without windows and YaRN, too
  const auto type_with = [&](auto change) {
    return type_of([&](auto& c) { gpt_oss(c), change(c); });
  };
  EXPECT_EQ(type_with([](auto& c) { c.sliding_window = 4, c.full_attention_freq = 2; }), "gpt_oss");
  EXPECT_EQ(type_with([](auto& c) { c.sliding_window = 4, c.first_window_layer = 1; }), "gpt_oss");
  EXPECT_EQ(type_with([](auto& c) { c.swiglu_alpha = 2, c.tie_word_embeddings = true; }),
            "gpt_oss");
  EXPECT_EQ(type_with([](auto& c) { c.swiglu_limit = 0; }), "tandem");
  EXPECT_EQ(type_with([](auto& c) { c.attention_sinks = false; }), "tandem");
  EXPECT_EQ(type_with([](auto& c) { c.fused_experts = false; }), "tandem");
  EXPECT_EQ(type_with([](auto& c) { c.router = "sigmoid"; }), "tandem");
  EXPECT_EQ(type_with([](auto& c) { c.shared_ffn = 8; }), "tandem");
}

TEST(ModelConfig, KeysOfVariantsAreChecked) {
  const auto error_with = [](auto change, const char* key, const nlohmann::ordered_json& value) {
    ModelConfig config = small_model();
    config.layers = 5;
    change(config);
    auto root = nlohmann::ordered_json::parse(to_json(config));
    root[key] = value;
    return error_of(root.dump());
  };
  const auto smollm3 = [](auto& c) { c.no_rope_layer_interval = 2; };
  const auto phi3 = [](auto& c) { c.fused_projections = true; };
  const std::string file = "dir/config.json: ";
  const auto sinks = [](auto& c) { c.attention_sinks = true; };
  EXPECT_EQ(error_with(sinks, "hidden_act", "swish"), "no error");
  EXPECT_EQ(error_with(sinks, "hidden_act", "gelu"),
            file + "hidden_act = \"gelu\": expected \"silu\" or \"gelu_pytorch_tanh\"");
  EXPECT_EQ(error_with(sinks, "attn_logit_softcapping", -3),
            file + "model.attention_softcap = -3: expected 0 (none) or 0.001 to 1e6");
  EXPECT_EQ(error_with(smollm3, "no_rope_layers", {1, 1, 1, 0, 1, 1, 1, 1}), "no error");
  EXPECT_EQ(error_with(smollm3, "no_rope_layers", {1, 1, 1, 1, 1}), "no error");
  EXPECT_EQ(error_with(smollm3, "no_rope_layers", {1, 0, 1, 1, 1}),
            file + "no_rope_layers = [1,0,1,1,1]: expected 0 in every n-th layer, n > 1");
  EXPECT_EQ(error_with(smollm3, "no_rope_layers", {0, 0, 0, 0, 0}),
            file + "no_rope_layers = [0,0,0,0,0]: expected 0 in every n-th layer, n > 1");
  EXPECT_EQ(error_with(smollm3, "no_rope_layers", {1, 0}),
            file +
                "no_rope_layers = [1,0]: expected an array of num_hidden_layers = 5 numbers, 0 "
                "or 1");
  EXPECT_EQ(error_with(smollm3, "use_sliding_window", true),
            file + "use_sliding_window = true: expected false");
  EXPECT_EQ(error_with(phi3, "partial_rotary_factor", 0.1),
            file +
                "partial_rotary_factor = 0.1: expected a share of head_dim = 6 that is an even "
                "number");
  EXPECT_EQ(error_with(phi3, "rope_scaling",
                       {{"type", "longrope"}, {"short_factor", {1.0}}, {"long_factor", {1.0}}}),
            file +
                "rope_scaling.type = \"longrope\": expected default, linear, dynamic, llama3 or "
                "yarn");
  EXPECT_EQ(error_with([](auto& c) { c.logits_scaling = 2; }, "residual_multiplier", 0),
            file + "residual_multiplier = 0: expected a number above 0");
  EXPECT_EQ(error_with(phi3, "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}),
            file + "rope_scaling = \"linear\": expected none for phi3");
}

TEST(ModelConfig, OverflowingSizesAreRefused) {
  ModelConfig config = small_model();
  config.vocab = config.hidden = config.ffn = config.layers = int64_t{1} << 31;
  EXPECT_THROW(config.check(1), ConfigError);
}

TEST(ModelConfig, WhatHasNoBackwardPassIsRefusedInTraining) {
  const auto error = [](int tp, auto change) -> std::string {
    ModelConfig config = small_model();
    change(config);
    EXPECT_NO_THROW(config.check(tp));
    try {
      config.check_training(tp);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error(4, [](auto&) {}), "no error");
  EXPECT_EQ(error(1, [](auto& c) { c.rope_scaling.type = "linear", c.rope_scaling.factor = 4; }),
            "no error");
  EXPECT_EQ(error(4, [](auto& c) { c.kv_heads = 2; }),
            "model.kv_heads = 2: expected a multiple of tp = 4 in training");
  EXPECT_EQ(error(1, [](auto& c) { c.qkv_bias = true; }), "no error");
  EXPECT_EQ(error(4, [](auto& c) { c.qk_norm = true; }), "no error");
  EXPECT_EQ(error(4, [](auto& c) { c.experts = 4, c.shared_ffn = 8, c.shared_expert_gate = true; }),
            "no error");
}

TEST(ModelConfig, CheckNamesTheKey) {
  const auto error = [](int tp, auto change) -> std::string {
    ModelConfig config = small_model();
    change(config);
    try {
      config.check(tp);
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error(4, [](auto&) {}), "no error");
  EXPECT_EQ(error(1, [](auto& c) { c.sliding_window = -1; }),
            "model.sliding_window = -1: expected 0 (none) to 2^31");
  EXPECT_EQ(error(1, [](auto& c) { c.rope_local_theta = 100; }),
            "model.rope_local_theta = 100: expected 0 where model.sliding_window is 0");
  EXPECT_EQ(error(1, [](auto& c) { c.sliding_window = 4, c.rope_local_theta = 0.5; }),
            "model.rope_local_theta = 0.5: expected 0 (none) or 1 to 1e15");
  EXPECT_EQ(error(1, [](auto& c) { c.attention_softcap = -1; }),
            "model.attention_softcap = -1: expected 0 (none) or 0.001 to 1e6");
  EXPECT_EQ(error(1, [](auto& c) { c.logits_softcap = 2e6; }),
            "model.logits_softcap = 2000000: expected 0 (none) or 0.001 to 1e6");
  EXPECT_EQ(error(1, [](auto& c) { c.mlp_activation = "relu"; }),
            "model.mlp_activation = relu: expected silu or gelu_pytorch_tanh");
  EXPECT_EQ(error(1, [](auto& c) { c.experts = 4, c.mlp_activation = "gelu_pytorch_tanh"; }),
            "model.mlp_activation = gelu_pytorch_tanh: expected silu where model.experts is above "
            "0");
  EXPECT_EQ(error(1, [](auto& c) { c.full_attention_freq = 2; }),
            "model.full_attention_freq = 2: expected 0 where model.sliding_window is 0");
  EXPECT_EQ(error(1, [](auto& c) { c.sliding_window = 4, c.full_attention_freq = 3; }),
            "model.full_attention_freq = 3: expected 0 (none) or 2 to model.layers = 2");
  EXPECT_EQ(error(0, [](auto&) {}), "tp 0: expected at least 1");
  EXPECT_EQ(error(3, [](auto&) {}), "model.heads = 4: expected a multiple of tp = 3");
  EXPECT_EQ(error(4, [](auto& c) { c.kv_heads = 2; }), "no error");  // two ranks share a head
  EXPECT_EQ(error(3, [](auto& c) { c.heads = 6, c.kv_heads = 2; }),
            "model.kv_heads = 2: expected a multiple or a divisor of tp = 3");
  EXPECT_EQ(error(1, [](auto& c) { c.sliding_window = 4, c.first_window_layer = 2; }),
            "model.first_window_layer = 2: expected 0 to 1");
  EXPECT_EQ(error(1, [](auto& c) { c.rope_scaling.type = "linear", c.rope_scaling.factor = 0.5; }),
            "model.rope_factor = 0.5: expected 1 to 1000000000");
  EXPECT_EQ(error(1, [](auto& c) { c.kv_heads = 3; }),
            "model.kv_heads = 3: expected a divisor of heads = 4");
  EXPECT_EQ(error(1, [](auto& c) { c.head_dim = 5; }),
            "model.head_dim = 5: expected an even number");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_position = "last"; }),
            "model.norm_position = last: expected pre, post or both");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_position = "post", c.experts = 4; }),
            "model.norm_position = post: expected pre where model.experts is above 0");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_position = "both", c.parallel_block = true; }),
            "model.norm_position = both: expected pre where model.parallel_block is true");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_position = "post", c.embedding_multiplier = 2; }),
            "model.embedding_multiplier = 2: expected 1 where model.norm_position is post");
  EXPECT_EQ(error(1, [](auto& c) { c.qk_norm_all_heads = true; }),
            "model.qk_norm_all_heads = true: expected model.qk_norm = true");
  EXPECT_EQ(error(1, [](auto& c) { c.rotary_dim = c.head_dim; }),
            "model.rotary_dim = 6: expected 0 (all) or an even number below model.head_dim = 6");
  EXPECT_EQ(error(1, [](auto& c) { c.no_rope_layer_interval = 1; }),
            "model.no_rope_layer_interval = 1: expected 0 (none) or at least 2");
  EXPECT_EQ(error(1, [](auto& c) { c.experts = 4, c.residual_multiplier = 0.5; }),
            "model.residual_multiplier = 0.5, embedding_multiplier = 1: expected 1 where "
            "model.experts is above 0");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_eps = 1e-20, c.embedding_multiplier = 1e6; }),
            "model.norm_eps = 1e-20 with embedding_multiplier = 1000000: expected a quotient of at "
            "least 1e-30");
  EXPECT_EQ(error(1, [](auto& c) { c.hidden = 0; }),
            "model.hidden = 0: expected between 1 and 2^31");
  EXPECT_EQ(error(1, [](auto& c) { c.norm_eps = 0; }), "model.norm_eps = 0: expected 1e-30 to 1");
}

// Every element of every tensor is on exactly one rank for any world size, and its initial value
// does not depend on the world size.
TEST(ModelLayout, ShardsMakeUpTheModel) {
  for (const Variant& variant : kVariants) {
    const ModelConfig config = small_model(variant);
    Tensors whole;
    for (const int tp : {1, 2, 4}) {
      if (config.kv_heads % tp != 0) continue;
      Tensors put_together;
      int64_t elements = 0;
      for (int rank = 0; rank < tp; ++rank) {
        const ModelLayout layout(config, tp, rank);
        std::vector<float> values(size_t(layout.size));
        initialize_parameters({}, layout, config, 23, flat(values));
        collect(layout.parameters, values, put_together);
        for (size_t i = 1; i < layout.branches.size(); ++i) {
          EXPECT_GT(layout.branches[i].begin, layout.branches[i - 1].begin);
        }
      }
      for (const auto& [name, values] : put_together) elements += int64_t(values.size());
      EXPECT_EQ(elements, config.parameters()) << variant.name;
      for (const auto& [name, values] : put_together) {
        EXPECT_EQ(std::ranges::count(values, 0.0f), 0) << name;
      }
      if (tp == 1) whole = put_together;
      EXPECT_EQ(put_together, whole) << variant.name << " tp " << tp;
    }
  }
}

}  // namespace
}  // namespace tandem
