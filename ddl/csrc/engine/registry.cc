#include "engine/registry.h"

namespace ddl {
namespace {

constexpr size_t kMostEarly = 4096, kMostFreed = 1024;

CommKey key_of(const NoticeContent& notice) { return {notice.comm, notice.birth}; }

}  // namespace

void Registry::keep(int from, const NoticeContent& notice) {
    if (freed(key_of(notice))) return;
    early_.emplace_back(from, notice);
    if (early_.size() > kMostEarly) early_.pop_front();
}

std::vector<std::pair<int, NoticeContent>> Registry::take(const CommKey& key) {
    std::vector<std::pair<int, NoticeContent>> found;
    std::deque<std::pair<int, NoticeContent>> others;
    for (auto& entry : early_) {
        if (key_of(entry.second) == key) {
            found.push_back(std::move(entry));
        } else {
            others.push_back(std::move(entry));
        }
    }
    early_.swap(others);
    return found;
}

void Registry::bury(const CommKey& key, Freed freed) {
    if (!freed_.emplace(key, std::move(freed)).second) return;
    order_.push_back(key);
    if (order_.size() > kMostFreed) {
        freed_.erase(order_.front());
        order_.pop_front();
    }
}

const Freed* Registry::freed(const CommKey& key) const {
    const auto found = freed_.find(key);
    return found == freed_.end() ? nullptr : &found->second;
}

}  // namespace ddl
