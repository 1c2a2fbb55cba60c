//! What the published folders, archives and files are called.

use super::{CifarKind, CifarLabels};
use crate::Split;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Binary,
    Python,
}

impl Form {
    /// The preferred one first.
    pub const ALL: [Form; 2] = [Form::Binary, Form::Python];
}

/// Sets that may be mistaken for each other.
pub(super) const KINDS: [CifarKind; 2] = [CifarKind::Ten, CifarKind::Hundred { labels: CifarLabels::Fine }];

impl CifarKind {
    pub(super) fn classes(self) -> usize {
        match self {
            CifarKind::Ten => 10,
            CifarKind::Hundred { labels: CifarLabels::Fine } => 100,
            CifarKind::Hundred { labels: CifarLabels::Coarse } => 20,
        }
    }

    /// Folder that the official archive unpacks to.
    pub(super) fn folder(self, form: Form) -> &'static str {
        match (self, form) {
            (CifarKind::Ten, Form::Binary) => "cifar-10-batches-bin",
            (CifarKind::Ten, Form::Python) => "cifar-10-batches-py",
            (CifarKind::Hundred { .. }, Form::Binary) => "cifar-100-binary",
            (CifarKind::Hundred { .. }, Form::Python) => "cifar-100-python",
        }
    }

    /// The official archive, and the same without gzip.
    pub(super) fn archives(self, form: Form) -> [&'static str; 2] {
        match (self, form) {
            (CifarKind::Ten, Form::Binary) => ["cifar-10-binary.tar.gz", "cifar-10-binary.tar"],
            (CifarKind::Ten, Form::Python) => ["cifar-10-python.tar.gz", "cifar-10-python.tar"],
            (CifarKind::Hundred { .. }, Form::Binary) => ["cifar-100-binary.tar.gz", "cifar-100-binary.tar"],
            (CifarKind::Hundred { .. }, Form::Python) => ["cifar-100-python.tar.gz", "cifar-100-python.tar"],
        }
    }

    /// The files of a split, in order.
    pub(super) fn files(self, form: Form, split: Split) -> &'static [&'static str] {
        match (self, form, split) {
            (CifarKind::Ten, Form::Binary, Split::Train) => &[
                "data_batch_1.bin",
                "data_batch_2.bin",
                "data_batch_3.bin",
                "data_batch_4.bin",
                "data_batch_5.bin",
            ],
            (CifarKind::Ten, Form::Binary, Split::Test) => &["test_batch.bin"],
            (CifarKind::Ten, Form::Python, Split::Train) => {
                &["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"]
            }
            (CifarKind::Ten, Form::Python, Split::Test) => &["test_batch"],
            (CifarKind::Hundred { .. }, Form::Binary, Split::Train) => &["train.bin"],
            (CifarKind::Hundred { .. }, Form::Binary, Split::Test) => &["test.bin"],
            (CifarKind::Hundred { .. }, Form::Python, Split::Train) => &["train"],
            (CifarKind::Hundred { .. }, Form::Python, Split::Test) => &["test"],
        }
    }

    /// The files of both splits.
    pub(super) fn all_files(self, form: Form) -> impl Iterator<Item = &'static str> {
        [Split::Train, Split::Test].into_iter().flat_map(move |split| self.files(form, split)).copied()
    }

    /// The file with the names of the classes.
    pub(super) fn names_file(self, form: Form) -> &'static str {
        match (self, form) {
            (CifarKind::Ten, Form::Binary) => "batches.meta.txt",
            (CifarKind::Ten, Form::Python) => "batches.meta",
            (CifarKind::Hundred { labels: CifarLabels::Fine }, Form::Binary) => "fine_label_names.txt",
            (CifarKind::Hundred { labels: CifarLabels::Coarse }, Form::Binary) => "coarse_label_names.txt",
            (CifarKind::Hundred { .. }, Form::Python) => "meta",
        }
    }

    /// Under which name the Python form keeps labels, and the names of classes.
    pub(super) fn keys(self) -> (&'static str, &'static str) {
        match self {
            CifarKind::Ten => ("labels", "label_names"),
            CifarKind::Hundred { labels: CifarLabels::Fine } => ("fine_labels", "fine_label_names"),
            CifarKind::Hundred { labels: CifarLabels::Coarse } => ("coarse_labels", "coarse_label_names"),
        }
    }
}
