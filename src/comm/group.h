// Groups by name and members.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

/// Communicator of `members`, ranks of `comm` in their new order, this rank among them. Called by
/// all of them with the same arguments. On CPU ranks no other rank is waited for, and nothing is
/// sent before the group's first use; its members need only call it in the same order if they pass
/// the same name and members again. On GPU ranks it is a split: collective over `comm`, in which
/// every rank is a member of one group.
std::unique_ptr<Communicator> make_group(Communicator& comm, std::string_view name,
                                         const std::vector<int>& members);

}  // namespace tandem
