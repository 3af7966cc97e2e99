// Membership boards of a launch on several hosts. The launcher has one with the words of all ranks,
// and each host's executor has one for the processes there. The executor copies ranks and
// generations from the launcher's, and the launcher copies what processes say from the executors'.
// Both ends must run the same program.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "comm/rendezvous/membership.h"

namespace tandem::control {

/// Reads what the launcher decides: ranks, layout and generation.
std::vector<std::byte> read_decisions(const Board& board);
/// Takes them over in the board of that host, the generation last, and wakes the processes. Throws
/// IoError for bytes that are none of a board of this size.
void apply_decisions(Board& board, int host, std::span<const std::byte> bytes);

/// Reads what the processes of those slots say: generation, step and progress, times as ages.
std::vector<std::byte> read_progress(const Board& board, std::span<const int> slots);
/// Takes it over, with times of this host's clock. Throws IoError as above.
void apply_progress(Board& board, std::span<const std::byte> bytes);

}  // namespace tandem::control
