#include "engine/infer/cache/prefix_tree.h"

#include <algorithm>
#include <utility>

#include "engine/infer/cache/kv_cache.h"

namespace tandem {

struct PrefixTree::Node {
  Node* parent = nullptr;
  int32_t page = -1;
  std::vector<int32_t> tokens = {};  ///< the parent's key
  std::map<std::vector<int32_t>, std::unique_ptr<Node>> children = {};
  int64_t users = 0;    ///< texts at this node or after it
  uint64_t unused = 0;  ///< time since when there is none
};

PrefixTree::PrefixTree(PagePool& pool) : pool_(pool), root_(std::make_unique<Node>()) {}
PrefixTree::~PrefixTree() = default;

void PrefixTree::use(Node& node) {
  if (++node.users > 1 || node.parent == nullptr) return;
  --unused_;
  droppable_.erase(node.unused);
}

PrefixTree::Node* PrefixTree::enter(std::span<const int32_t> tokens) {
  Node* at = root_.get();
  use(*at);
  for (; tokens.size() >= size_t(kPageTokens); tokens = tokens.subspan(size_t(kPageTokens))) {
    const auto key = tokens.first(size_t(kPageTokens));
    const auto found = at->children.find({key.begin(), key.end()});
    if (found == at->children.end()) break;
    at = found->second.get();
    use(*at);
  }
  return at;
}

std::vector<int32_t> PrefixTree::pages(const Node* last) const {
  std::vector<int32_t> pages;
  for (; last->parent != nullptr; last = last->parent) pages.push_back(last->page);
  std::ranges::reverse(pages);
  return pages;
}

PrefixTree::Node* PrefixTree::extend(Node* last, std::span<const int32_t> tokens, int32_t page) {
  std::vector<int32_t> key(tokens.begin(), tokens.end());
  std::unique_ptr<Node>& child = last->children[key];
  if (child) {
    pool_.give_back(std::span(&page, 1));
  } else {
    child = std::make_unique<Node>(Node{.parent = last, .page = page, .tokens = std::move(key)});
    ++unused_;  // until it is used, below
  }
  use(*child);
  return child.get();
}

int32_t PrefixTree::page(const Node* node) const {
  return node->page;
}

void PrefixTree::leave(Node* last) {
  for (; last != nullptr; last = last->parent) {
    if (--last->users > 0 || last->parent == nullptr) continue;
    ++unused_;
    last->unused = ++clock_;
    if (last->children.empty()) droppable_[last->unused] = last;
  }
}

void PrefixTree::drop_oldest() {
  const auto oldest = droppable_.begin();
  Node* const node = oldest->second;
  Node* const parent = node->parent;
  droppable_.erase(oldest);
  --unused_;
  pool_.give_back(std::span(&node->page, 1));
  parent->children.erase(std::vector<int32_t>(node->tokens));
  if (parent->parent == nullptr || parent->users > 0 || !parent->children.empty()) return;
  droppable_[parent->unused] = parent;
}

}  // namespace tandem
