// Layouts of tiny models: combinations of parallel sizes, schedules, microbatches and models.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/data/corpus.h"

namespace tandem {

/// A tiny model without experts, or with four of them, on one rank: 4 layers, 8 samples of 8 tokens
/// a step.
TrainConfig tiny_config(bool has_experts);

/// "tp 2 dp 1 ep 1 pp 2 1f1b, microbatch 1, experts, tied, window"
std::string describe_layout(const TrainConfig& config);

/// All valid layouts of at most eight ranks, different from each other, in an order that depends on
/// the seed, as does each one's train.recompute.
std::vector<TrainConfig> generate_layouts(uint64_t seed);

/// Layouts of two or four context-parallel ranks, at most eight in all: those of generate_layouts,
/// and of no other axis, with every parallel.zero, and sequences of 2 to 8 tokens, some divided
/// into documents or packed.
std::vector<TrainConfig> generate_context_layouts(uint64_t seed);

/// Layouts that allow wire formats (parallel.codec), with one each, in turn.
std::vector<TrainConfig> with_wires(const std::vector<TrainConfig>& layouts,
                                    const std::vector<std::string>& codecs);

/// Text of jobs.
const Corpus& tiny_corpus();
/// With data.document_mask a text of documents of 1 to 9 bytes, else tiny_corpus().
const Corpus& corpus_of(const TrainConfig& config);

}  // namespace tandem
