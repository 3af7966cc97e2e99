#include "comm/processes/connect_ranks.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/store_protocol.h"

namespace tandem::processes {
namespace {

/// Fixed-size form of a Newcomer.
struct Word {
  Build build;
  Digest node{};
  control::FixedText<480> refusal;
};

void check_words(std::string_view what, const Newcomer& local, const std::vector<Word>& words,
                 int max_ranks_of_node) {
  if (!local.refusal.empty()) throw InvalidArgument(fmt::format("{}: {}", what, local.refusal));
  std::map<Digest, int> of_nodes;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (const auto refusal = words[rank].refusal.view(); !refusal.empty()) {
      throw InvalidArgument(fmt::format("{}: rank {}: {}", what, rank, refusal));
    }
    ++of_nodes[words[rank].node];
  }
  for (const auto& [node, ranks] : of_nodes) {
    if (ranks <= max_ranks_of_node) continue;
    throw Unsupported(fmt::format("{}: {} ranks of one node: expected at most {}", what, ranks,
                                  max_ranks_of_node));
  }
}

}  // namespace

Connected connect_ranks(std::string_view what, const Newcomer& local, const control::Gather& gather,
                        int max_ranks_of_node, double deadline_s) {
  Word word{local.build, sha256(control::bytes_of(local.node)), {}};
  word.refusal = local.refusal;
  const auto words = control::gather_all(gather, word, local.size);
  std::vector<Build> builds;
  for (const Word& each : words) builds.push_back(each.build);
  require_same_build(builds);
  check_words(what, local, words, max_ranks_of_node);
  const bool one_host = std::all_of(words.begin(), words.end(),
                                    [&](const Word& each) { return each.node == words[0].node; });
  auto contact = control::contact_rank_zero(what, local.rank, local.size, one_host, gather);
  std::string world = contact.launch.world;
  auto bootstrap = std::make_unique<RendezvousBootstrap>(std::move(contact), deadline_s);
  return {new_member(std::move(bootstrap), {.deadline_s = deadline_s}), std::move(world)};
}

}  // namespace tandem::processes
