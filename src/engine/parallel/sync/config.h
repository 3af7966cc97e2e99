// Table `sync`: learners, replicas that train apart and exchange what they have learned every few
// steps (DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; SparseLoCo, arXiv
// 2508.15706), or the largest cosines of their gradients in every step (DeMo, arXiv 2411.19870).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "codec/topk.h"

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct SyncConfig {
  std::string method = "none";
  int64_t learners = 0;  ///< this and the next two, 0: not given
  int64_t every = 0;
  int64_t fragments = 0;
  int64_t delay = 0;
  std::string codec = "none";  ///< a Wire
  double outer_lr = -1;        ///< this and the next, -1: the method's
  double outer_momentum = -1;
  bool outer_nesterov = true;
  double mix = -1;     ///< -1: 0.5 with a delay
  int64_t quorum = 0;  ///< 0: learners
  double topk = -1;    ///< -1: dense messages; with method demo 32
  int64_t bits = 0;    ///< this and the next two, as -1: not given
  double beta = -1;
  int64_t tile = 0;

  bool is_on() const { return method != "none"; }
  int64_t num_learners() const { return is_on() && learners > 0 ? learners : 1; }
  int64_t num_fragments() const { return fragments > 0 ? fragments : 1; }
  bool is_demo() const { return method == "demo"; }
  /// Learners whose messages an exchange needs, and whether it may be without others.
  int64_t min_counted() const { return quorum > 0 ? quorum : num_learners(); }
  bool has_quorum() const { return min_counted() < num_learners(); }
  bool is_sparse() const { return topk > 0 || is_demo(); }
  /// Steps from one exchange of a weight to the next.
  int64_t period() const { return is_demo() ? 1 : every; }
  /// Sparse messages: of `chunk` values a share, at least one.
  codec::TopK sparse(int chunk = codec::kMaxTopKChunk) const;
  /// Factor of changes that were not sent, from one message to the next.
  double decay() const { return beta >= 0 ? beta : is_demo() ? 0.999 : 0.95; }
  int tile_side() const { return tile > 0 ? int(tile) : 64; }
  double lr() const { return outer_lr >= 0 ? outer_lr : is_sparse() ? 1 : 0.7; }
  double momentum() const { return outer_momentum >= 0 ? outer_momentum : is_sparse() ? 0 : 0.9; }
  /// Share of a learner's weights that an exchange leaves.
  double local_share() const { return delay == 0 ? 0 : mix >= 0 ? mix : 0.5; }

  static std::span<const Key<SyncConfig>> keys();
  /// `dp`: parallel.dp. Throws ConfigError for a key without effect, learners that do not divide
  /// the ranks, and exchanges that would overlap.
  void check(int64_t dp) const;
};

}  // namespace tandem
