// What ranks must agree on beyond the words of their command line: each may run in a folder of its
// own.
#pragma once

#include <string>
#include <string_view>

#include "tandem/communicator.h"

namespace tandem {

/// Collective: throws Mismatch, on every rank, naming `what` and where each of two ranks finds
/// `path`, unless all ranks of one machine find the same place. It need not be there yet. Ranks of
/// different machines may have different file systems: nothing is compared between them.
void require_same_place(Communicator& world, std::string_view what, const std::string& path);

}  // namespace tandem
