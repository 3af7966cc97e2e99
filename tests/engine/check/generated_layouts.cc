#include "generated_layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "engine/parallel/dims.h"
#include "schedule/pipeline.h"
#include "tandem/random.h"
#include "tests/engine/train/sample_text.h"

namespace tandem {
namespace {

/// Choices besides the parallel sizes.
struct Variant {
  bool has_experts, tied, parallel_block, window, whole_step_aux_loss;
  int64_t microbatch;
};

constexpr std::array<const char*, 3> kRecompute{"none", "selective", "full"};

std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  for (int bits = 0; bits < 32; ++bits) {
    for (const int64_t microbatch : {1, 2}) {
      const Variant variant{(bits & 1) != 0, (bits & 2) != 0,  (bits & 4) != 0,
                            (bits & 8) != 0, (bits & 16) != 0, microbatch};
      if (variant.has_experts ? variant.parallel_block : variant.whole_step_aux_loss) continue;
      all.push_back(variant);
    }
  }
  return all;
}

TrainConfig make_config(const Variant& v) {
  TrainConfig config = tiny_config(v.has_experts);
  config.model.tie_word_embeddings = v.tied;
  config.model.parallel_block = v.parallel_block;
  config.model.sliding_window = v.window ? 3 : 0;
  config.model.full_attention_freq = v.window ? 2 : 0;
  config.train.microbatch = v.microbatch;
  if (v.whole_step_aux_loss) config.train.aux_loss_scope = "step";
  return config;
}

/// Schedules of one layout; one without pipeline stages.
void add_schedules(TrainConfig config, std::vector<TrainConfig>& all) {
  for (const schedule::PipelineKind kind : schedule::pipeline_kinds()) {
    if (config.parallel.pp > 1) {
      config.parallel.schedule = schedule::name_of(kind);
      config.parallel.virtual_stages = schedule::min_chunks(kind);
    }
    if (config.is_valid()) all.push_back(config);
    if (config.parallel.pp == 1) return;
  }
}

}  // namespace

TrainConfig tiny_config(bool has_experts) {
  TrainConfig config;
  auto& model = config.model;
  model.hidden = 16;
  model.layers = 4;
  model.heads = model.kv_heads = 4;
  model.head_dim = 4;
  model.ffn = 24;
  model.max_seq = 8;
  model.tie_word_embeddings = false;
  if (has_experts) {
    model.experts = 4;
    model.expert_ffn = 8;
    model.moe_layer_freq = 2;
  }
  config.train.batch = 8;
  config.train.microbatch = 1;
  config.train.seq = 8;
  config.train.dtype = "f32";
  config.optimizer.warmup = 0;
  config.optimizer.grad_clip = 0.25;  // below the norms of the first steps
  config.optimizer.eps = 1e-4;
  config.parallel.strategy = "serial";
  config.data.paths = {sample_folder()};
  return config;
}

std::string describe_layout(const TrainConfig& config) {
  std::string text = ParallelDims(config.parallel).describe();
  if (config.parallel.pp > 1) text += " " + config.parallel.schedule;
  text += fmt::format(", microbatch {}", config.train.microbatch);
  if (config.model.experts > 0) text += ", experts";
  if (config.model.tie_word_embeddings) text += ", tied";
  if (config.model.parallel_block) text += ", parallel block";
  if (config.model.sliding_window > 0) text += ", window";
  if (config.train.aux_loss_scope == "step") text += ", auxiliary loss of the step";
  if (config.train.recompute != "none") text += ", recompute " + config.train.recompute;
  if (config.parallel.zero != 1) text += fmt::format(", zero {}", config.parallel.zero);
  if (config.parallel.cp > 1) text += fmt::format(", seq {}", config.train.seq);
  if (config.data.document_mask) text += ", documents";
  if (config.data.packing != "none") text += ", packed";
  if (config.parallel.codec != "none") text += ", " + config.parallel.codec;
  return text;
}

std::vector<TrainConfig> generate_layouts(uint64_t seed) {
  std::vector<TrainConfig> all;
  for (const Variant& variant : all_variants()) {
    for (const int64_t tp : {1, 2, 4}) {
      for (const int64_t pp : {1, 2, 4}) {
        for (const int64_t dp : {1, 2, 4, 8}) {
          for (const int64_t ep : {1, 2, 4}) {
            const int64_t ranks = tp * pp * dp;
            if (ranks == 1 || ranks > 8 || dp % ep != 0 || (ep > 1 && !variant.has_experts))
              continue;
            TrainConfig config = make_config(variant);
            config.parallel.tp = tp;
            config.parallel.pp = pp;
            config.parallel.dp = dp;
            config.parallel.ep = ep;
            add_schedules(config, all);
          }
        }
      }
    }
  }
  std::vector<std::pair<uint32_t, size_t>> keys;
  for (size_t i = 0; i < all.size(); ++i) keys.emplace_back(philox(seed, 1, i)[0], i);
  std::ranges::sort(keys);
  std::vector<TrainConfig> shuffled;
  for (const auto& [key, i] : keys) {
    shuffled.push_back(all[i]);
    shuffled.back().train.recompute = kRecompute[philox(seed, 2, i)[0] % kRecompute.size()];
  }
  return shuffled;
}

std::vector<TrainConfig> generate_context_layouts(uint64_t seed) {
  std::vector<TrainConfig> others = generate_layouts(seed);
  for (const Variant& variant : all_variants()) others.push_back(make_config(variant));
  std::vector<TrainConfig> all;
  for (size_t i = 0; i < others.size(); ++i) {
    const auto draw = philox(seed, 3, i);
    TrainConfig config = others[i];
    config.parallel.cp = draw[0] % 2 == 0 ? 2 : 4;
    if (ParallelDims(config.parallel).ranks() > 8) continue;
    config.parallel.zero = draw[0] / 2 % 3;
    config.train.seq = 1 + draw[1] % (2 * config.parallel.cp);  // fewer than cp leave ranks without
    config.data.document_mask = draw[2] % 2 == 0;
    if (draw[2] % 4 == 0) config.data.packing = "best_fit";
    if (config.is_valid()) all.push_back(config);
  }
  return all;
}

std::vector<TrainConfig> with_wires(const std::vector<TrainConfig>& layouts,
                                    const std::vector<std::string>& codecs) {
  std::vector<TrainConfig> all;
  for (size_t i = 0; i < layouts.size(); ++i) {
    TrainConfig config = layouts[i];
    config.parallel.codec = codecs[i % codecs.size()];
    if (config.is_valid()) all.push_back(config);
  }
  return all;
}

const Corpus& tiny_corpus() {
  static const Corpus corpus(tiny_config(false).data.paths, 0);
  return corpus;
}

const Corpus& corpus_of(const TrainConfig& config) {
  if (!config.data.document_mask) return tiny_corpus();
  static const TempDir dir;
  static const bool written = [] {
    const std::string text = sample_text();
    for (uint64_t i = 0, at = 0; i < 200; ++i) {
      const uint64_t bytes = 1 + philox(41, 0, i)[0] % 9;
      write_bytes(dir / fmt::format("{:03}.txt", i), text.substr(at, bytes));
      at += bytes;
    }
    return true;
  }();
  static_cast<void>(written);
  static const Corpus corpus(std::vector<std::string>{dir.path()}, 0);
  return corpus;
}

}  // namespace tandem
